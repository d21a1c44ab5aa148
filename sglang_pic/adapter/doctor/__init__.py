"""Runs the checks of start-up on a server's arguments and model, without starting the server."""
