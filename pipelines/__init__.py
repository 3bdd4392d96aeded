"""KFP pipelines: graphs over the components, no logic."""
