"""The decision core: events in, orders out, no I/O."""
