"""Ways of stepping many environments together, each writing into arrays it is given."""
