"""The model: attention, expert library, query network, key store, knowledge gravity, and the whole."""
