# OpenTofu 1.8 or Terraform 1.8 and later: only what both understand is used.
# Resources name their region themselves (AWS provider 6), so one run covers all regions of a fleet.
terraform {
  required_version = ">= 1.8"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.0"
    }
  }
}

provider "aws" {
  region = var.home_region
  default_tags {
    tags = { "coral:managed-by" = "terraform", "coral:deployment" = var.name }
  }
}
