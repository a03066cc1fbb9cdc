"""Settings: dataclasses of plain values, their limits and their documentation."""
