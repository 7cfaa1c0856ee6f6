"""The wire: process groups and what goes over them. No knowledge of models or plans."""
