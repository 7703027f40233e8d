"""What every level shares: context, weight store, files, the numeric check of passes."""
