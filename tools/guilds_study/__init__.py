"""Guilds on real text: from trained runs to small records, and from records to docs/studies/guilds.md."""
