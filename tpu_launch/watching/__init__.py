"""How a run is, for whoever watches: from its model directory alone."""
