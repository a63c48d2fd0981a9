"""What survives crashes, disconnects and a store that is held by others."""
