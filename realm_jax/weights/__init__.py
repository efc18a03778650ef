"""Other people's weights, read and written by tables of names."""
