"""Put on sys.path for spawned processes; holds nothing but the stand-in package."""
