"""Parts that the kernel does without: a folder each, named in the composition root, and absent where it is off."""
