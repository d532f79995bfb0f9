"""Inter-process communication: codec, channel, event loop, listener, connector, helper processes."""
