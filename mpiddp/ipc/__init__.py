"""Inter-process communication: messages, channel, event loop, authenticated connections, helper processes."""
