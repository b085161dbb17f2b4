variable "name" {
  type        = string
  description = "Prefix of all names."
}

variable "region" {
  type        = string
  description = "The region."
}

variable "cidr" {
  type        = string
  description = "Addresses of the region's network: a /16 gives 16 parts, the lower half public, the upper half private."
}

variable "zones" {
  type        = list(string)
  description = "Zones with a subnet each."
}

variable "fleet_cidrs" {
  type        = list(string)
  description = "Addresses of all of the fleet's networks."
}

variable "node_ami" {
  type        = string
  description = "Image of the nodes: GPU driver, vLLM's environment and coral-serve."
}

variable "node_volume_gib" {
  type        = number
  description = "Root volume."
}

variable "node_profile_arn" {
  type        = string
  description = "Instance profile of the nodes."
}

variable "launch_template" {
  type        = string
  description = "Name of the launch template."
}

variable "user_data" {
  type        = string
  description = "cloud-init of the nodes."
}

variable "log_retention_days" {
  type        = number
  description = "How long flow logs are kept."
}

resource "aws_vpc" "this" {
  region               = var.region
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# The group that comes with every network: nothing in, nothing out.
resource "aws_default_security_group" "none" {
  region = var.region
  vpc_id = aws_vpc.this.id
}

resource "aws_internet_gateway" "this" {
  region = var.region
  vpc_id = aws_vpc.this.id
}

resource "aws_subnet" "public" {
  count             = length(var.zones)
  region            = var.region
  vpc_id            = aws_vpc.this.id
  availability_zone = var.zones[count.index]
  cidr_block        = cidrsubnet(var.cidr, 4, count.index)
  tags              = { Name = "${var.name}-public-${var.zones[count.index]}" }
}

resource "aws_subnet" "private" {
  count             = length(var.zones)
  region            = var.region
  vpc_id            = aws_vpc.this.id
  availability_zone = var.zones[count.index]
  cidr_block        = cidrsubnet(var.cidr, 4, 8 + count.index)
  tags              = { Name = "${var.name}-private-${var.zones[count.index]}" }
}

resource "aws_route_table" "public" {
  region = var.region
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-public" }
}

resource "aws_route" "internet" {
  region                 = var.region
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  count          = length(var.zones)
  region         = var.region
  subnet_id      = aws_subnet.public[count.index].id
  route_table_id = aws_route_table.public.id
}

# Nodes go out (package updates, AWS's own interfaces), nobody comes in.
resource "aws_eip" "nat" {
  region = var.region
  domain = "vpc"
}

resource "aws_nat_gateway" "this" {
  region        = var.region
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.public[0].id
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "private" {
  region = var.region
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route" "nat" {
  region                 = var.region
  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this.id
}

resource "aws_route_table_association" "private" {
  count          = length(var.zones)
  region         = var.region
  subnet_id      = aws_subnet.private[count.index].id
  route_table_id = aws_route_table.private.id
}

# Weights come from S3 past the NAT gateway, which would charge for every gigabyte.
resource "aws_vpc_endpoint" "s3" {
  region            = var.region
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private.id]
}

resource "aws_cloudwatch_log_group" "flow" {
  region            = var.region
  name              = "/${var.name}/network"
  retention_in_days = var.log_retention_days
}

resource "aws_flow_log" "this" {
  region          = var.region
  vpc_id          = aws_vpc.this.id
  traffic_type    = "REJECT"
  log_destination = aws_cloudwatch_log_group.flow.arn
  iam_role_arn    = aws_iam_role.flow_log.arn
}

data "aws_iam_policy_document" "flow_log_assumes" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["vpc-flow-logs.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "flow_log" {
  name               = "${var.name}-flow-log-${var.region}"
  assume_role_policy = data.aws_iam_policy_document.flow_log_assumes.json
}

data "aws_iam_policy_document" "flow_log" {
  statement {
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    resources = ["${aws_cloudwatch_log_group.flow.arn}:*"]
  }
}

resource "aws_iam_role_policy" "flow_log" {
  name   = "write"
  role   = aws_iam_role.flow_log.id
  policy = data.aws_iam_policy_document.flow_log.json
}

resource "aws_security_group" "node" {
  region      = var.region
  name_prefix = "${var.name}-node-"
  description = "Nodes: anything among the fleet's own networks, nothing from outside."
  vpc_id      = aws_vpc.this.id
  tags        = { Name = "${var.name}-node" }
}

resource "aws_vpc_security_group_ingress_rule" "node" {
  for_each          = toset(var.fleet_cidrs)
  region            = var.region
  security_group_id = aws_security_group.node.id
  description       = "Activations, KV cache and control within the fleet."
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 1024
  to_port           = 65535
}

# Elastic Fabric Adapters want a group that allows itself everything.
resource "aws_vpc_security_group_ingress_rule" "node_efa" {
  region                       = var.region
  security_group_id            = aws_security_group.node.id
  description                  = "Elastic Fabric Adapter among nodes."
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "node_efa" {
  region                       = var.region
  security_group_id            = aws_security_group.node.id
  description                  = "Elastic Fabric Adapter among nodes."
  referenced_security_group_id = aws_security_group.node.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "node" {
  region            = var.region
  security_group_id = aws_security_group.node.id
  description       = "Out, through the NAT gateway and the S3 endpoint."
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_vpc_security_group_egress_rule" "node_fleet" {
  for_each          = toset(var.fleet_cidrs)
  region            = var.region
  security_group_id = aws_security_group.node.id
  description       = "To the coordinator and other nodes."
  cidr_ipv4         = each.value
  ip_protocol       = "tcp"
  from_port         = 1024
  to_port           = 65535
}

# What AwsLaunch.launch_template names. RunInstances adds type, zone, market, tags and placement group.
resource "aws_launch_template" "node" {
  region                 = var.region
  name                   = var.launch_template
  image_id               = var.node_ami
  vpc_security_group_ids = [aws_security_group.node.id]
  update_default_version = true
  # An instance that is shut down from inside is gone, not stopped and paid for.
  instance_initiated_shutdown_behavior = "terminate"
  user_data                            = base64encode(var.user_data)
  tags                                 = { "coral:launch-template" = var.launch_template }

  iam_instance_profile {
    arn = var.node_profile_arn
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  block_device_mappings {
    device_name = "/dev/sda1"
    ebs {
      encrypted             = true
      delete_on_termination = true
      volume_type           = "gp3"
      volume_size           = var.node_volume_gib
      throughput            = 1000
      iops                  = 4000
    }
  }

  monitoring {
    enabled = true
  }
}

output "vpc_id" {
  value = aws_vpc.this.id
}

output "public_subnets" {
  value = aws_subnet.public[*].id
}

output "private_subnets" {
  value = aws_subnet.private[*].id
}

output "private_route_table" {
  value = aws_route_table.private.id
}

output "subnet_of_zone" {
  value = { for subnet in aws_subnet.private : subnet.availability_zone => subnet.id }
}
