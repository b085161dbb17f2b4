# Copy, fill in what is marked, and: tofu init && tofu plan -var-file=my.tfvars
name        = "coral"
fleets      = ["production"]
home_region = "us-east-2"
regions = {
  us-east-2 = { cidr = "10.40.0.0/16", zones = ["us-east-2a", "us-east-2b"], node_ami = "ami-00000000000000000" } # your image
  us-west-2 = { cidr = "10.41.0.0/16", zones = ["us-west-2a", "us-west-2b"], node_ami = "ami-00000000000000000" } # your image
}
control_ami             = "ami-00000000000000000"                                                      # your image
gateway_certificate_arn = "arn:aws:acm:us-east-2:000000000000:certificate/00000000-0000-0000-0000-000000000000" # yours
coral_version           = "0.1.0"
