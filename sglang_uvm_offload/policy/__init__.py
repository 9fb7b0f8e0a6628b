"""Which experts should be resident: pure functions of arrays, over numpy alone."""
