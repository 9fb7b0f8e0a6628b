"""Decides which experts should be resident. Pure functions of arrays that need numpy alone."""
