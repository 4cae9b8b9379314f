"""A run while it is recorded and read: its view, its training, its rehearsal, its replays."""
