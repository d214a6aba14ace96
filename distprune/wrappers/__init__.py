"""What torch's wrappers do not offer in public: one adapter file per wrapper."""
