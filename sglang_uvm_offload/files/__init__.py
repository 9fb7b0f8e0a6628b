"""Reading files of unknown origin, and writing files without destroying existing ones."""
