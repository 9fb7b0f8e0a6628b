"""What an operator sees and does while a server runs: HTTP routes, actions, metrics and the final save."""
