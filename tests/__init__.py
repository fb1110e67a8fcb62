"""paceline's tests. Started ranks import test modules by name, so this folder is a package."""
