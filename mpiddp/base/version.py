"""The version of the package; its metadata is made from this."""

__version__ = "0.1.0"
