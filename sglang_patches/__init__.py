"""The only importer of sglang: every change that kvedit makes to the host lives here."""
