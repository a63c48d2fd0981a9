"""A trainer that is killed and restarted, with and without a checkpoint of its rollouts."""
