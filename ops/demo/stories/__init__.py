"""What the agents of `turnlog demo --full` are asked, do and are told: 60 sessions in six groups."""
