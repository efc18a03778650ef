"""The commands of `realm`, one thin module each. They and `tpu_launch` read gin."""
