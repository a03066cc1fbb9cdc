"""Commands: those of recipes, ``kit steps``, ``compare``, ``evaluate``, ``record``, ``export``."""
