"""How processes of a job talk: codec, channel, event loop, listener, connector, helper processes."""
