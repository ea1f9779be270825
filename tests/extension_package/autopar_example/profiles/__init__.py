"""Device profiles, as TOML files."""
