"""The training session: model and adapter loading, one transaction's update, checkpoints."""
