"""Conversion of text to arrays: plain functions with thin wrappers around them."""
