"""Will a model fit a machine, with how many residents, and how fast; before anything loads."""
