"""The command line: recipes, ``kit steps``, ``kit compare``, ``kit record``, run folders."""
