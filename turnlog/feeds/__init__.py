"""Adapters that carry Turnlog's rows into trainers' own packages. Each module needs its trainer's package."""
