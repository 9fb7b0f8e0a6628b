"""The router's choices: counts them, saves them between runs, and records traces."""
