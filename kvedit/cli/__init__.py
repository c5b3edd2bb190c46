"""The kvedit command."""
