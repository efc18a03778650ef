"""The commands of `realm`, one thin module each. Only these read gin and flags."""
