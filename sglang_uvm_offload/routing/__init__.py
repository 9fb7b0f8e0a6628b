"""The router's choices: counted, saved between runs, recorded."""
