"""What a server does beside the way of a request: each feature goes with its module and its line in `factory.py`."""
