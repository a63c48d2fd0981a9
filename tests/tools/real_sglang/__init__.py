"""The published SGLang on the CPU, whose scheduler is scripted: it samples what a test tells it, and no model runs."""
