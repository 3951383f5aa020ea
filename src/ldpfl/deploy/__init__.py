"""Deploy on Flower: a trial of all parties on one machine, from which a deployment on several can be copied."""
