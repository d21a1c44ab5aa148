"""What the start-up checks measure and how they judge; the adapter runs the model for them."""
