"""How text becomes arrays: plain functions first, thin wrappers around them."""
