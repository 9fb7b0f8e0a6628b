"""Reading files of unknown origin, and writing files without losing what is there."""
