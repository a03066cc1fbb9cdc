"""The command line: recipes, ``kit steps``, run folders."""
