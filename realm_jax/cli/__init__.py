"""The commands of `realm`: one thin module each. Gin and flags are read here only."""
