"""The command line: recipes, ``kit steps``, ``kit record``, run folders."""
