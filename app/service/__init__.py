"""One file a use case: what the routes do, between the rules (`domain`) and the world (`store`, `upstream`)."""
