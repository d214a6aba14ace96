"""The result folder: who may write it, how it grows, and how a stopped run resumes."""
