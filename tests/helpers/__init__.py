"""What several test files share: models, oracles, faults. tests/README.md says what is where."""
