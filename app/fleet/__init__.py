"""The engines, their health, and the gates that hold turns back."""
