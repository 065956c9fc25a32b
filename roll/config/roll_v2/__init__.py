"""The keys of ROLL v0.2.1 and their translation to the keys of this schema."""
